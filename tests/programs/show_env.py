"""Print what the rank was given: argv, folder and the variables named in SHOW, as one line of JSON."""
import json, os, sys
names = os.environ.get("SHOW", "").split()
print(json.dumps({
    "argv": sys.argv, "cwd": os.getcwd(), "executable": sys.executable, "path0": sys.path[0],
    "env": {name: os.environ.get(name) for name in names},
}))
