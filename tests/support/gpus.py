"""An nvidia-smi for the tests: a program that prints what a file says of GPUs, processes, MIG slices and errors."""

from __future__ import annotations

import json
import os
import sys
import uuid
from pathlib import Path
from typing import Any

GIB = 1024

_PROGRAM = """#!{python} -S
import json, sys
gpus = json.load(open({path!r}))
if sys.argv[1:] == ["-L"]:
    for index, gpu in enumerate(gpus):
        print(f"GPU {{index}}: NVIDIA H100 (UUID: {{gpu['uuid']}})")
        for part, one in enumerate(gpu.get("mig", ())):
            print(f"  MIG 3g.40gb     Device  {{part}}: (UUID: {{one['uuid']}})")
elif sys.argv[1:] == ["-q", "-x"]:
    def memory(one):
        return f"<fb_memory_usage><total>{{one['total']}} MiB</total><used>{{one['used']}} MiB</used></fb_memory_usage>"
    print('<?xml version="1.0" ?><!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd"><nvidia_smi_log>')
    for gpu in gpus:
        ids = "<gpu_instance_id>{{}}</gpu_instance_id><compute_instance_id>{{}}</compute_instance_id>"
        print(f"<gpu><product_name>NVIDIA H100</product_name><uuid>{{gpu['uuid']}}</uuid>{{memory(gpu)}}")
        print(f"<mig_mode><current_mig>{{'Enabled' if 'mig' in gpu else 'Disabled'}}</current_mig></mig_mode>")
        print("<mig_devices>")
        for part, one in enumerate(gpu.get("mig", ())):
            print(f"<mig_device><index>{{part}}</index>{{ids.format(part + 1, 0)}}{{memory(one)}}</mig_device>")
        print("</mig_devices><ecc_errors><volatile><dram_correctable>7</dram_correctable>")
        print(f"<dram_uncorrectable>{{gpu['errors']}}</dram_uncorrectable></volatile></ecc_errors><processes>")
        for where, one in [(None, gpu), *enumerate(gpu.get("mig", ()))]:
            at = ids.format("N/A", "N/A") if where is None else ids.format(where + 1, 0)
            for kind, pid in one["processes"]:
                print(f"<process_info>{{at}}<pid>{{pid}}</pid><type>{{kind}}</type></process_info>")
        print("</processes></gpu>")
    print("</nvidia_smi_log>")
else:
    sys.exit("Unable to determine the device handle for GPU0000:07:00.0: Unknown Error")
"""


class FakeGpus:
    """GPUs with UUIDs of their own, so that leases of other tests are none of theirs."""

    def __init__(self, folder: Path, count: int = 8) -> None:
        """In `folder` there will be the program."""
        self._path = folder / "gpus.json"
        self._gpus: list[dict[str, Any]] = [self._new("GPU") for _ in range(count)]
        self.uuids = [gpu["uuid"] for gpu in self._gpus]
        program = folder / "nvidia-smi"
        program.write_text(_PROGRAM.format(python=sys.executable, path=str(self._path)))
        program.chmod(0o755)
        self._write()

    def _new(self, kind: str) -> dict[str, Any]:
        return {"uuid": f"{kind}-{uuid.uuid4()}", "total": 80 * GIB, "used": 3, "errors": 0, "processes": []}

    def change(self, index: int, **what: Any) -> None:
        """Change a GPU: `used` in MiB, `errors`, `processes` as [type, pid] each."""
        self._gpus[index].update(what)
        self._write()

    def split(self, index: int, count: int) -> list[str]:
        """Split a GPU into MIG slices; returns their UUIDs."""
        self._gpus[index]["mig"] = [self._new("MIG") for _ in range(count)]
        self._write()
        return [part["uuid"] for part in self._gpus[index]["mig"]]

    def change_slice(self, index: int, part: int, **what: Any) -> None:
        """Change one of its slices likewise."""
        self._gpus[index]["mig"][part].update(what)
        self._write()

    def _write(self) -> None:
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(self._gpus))
        os.replace(new, self._path)

    def lease_files(self) -> list[Path]:
        """The files of leases of these GPUs, with those of their slices."""
        every = [*self.uuids, *(part["uuid"] for gpu in self._gpus for part in gpu.get("mig", ()))]
        return [path for place in ("/run/lock", "/tmp") for uuid in every for path in Path(place).glob(f"*{uuid}*")]

    def close(self) -> None:
        """Remove the files of leases, which nobody else needs."""
        for path in self.lease_files():
            path.unlink()
