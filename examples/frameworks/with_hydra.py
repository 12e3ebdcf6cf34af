"""Hydra composes the configuration of each rank: overrides of it go after the script's name."""

import os

import hydra
from omegaconf import DictConfig


@hydra.main(version_base=None)
def main(config: DictConfig) -> None:
    print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}: lr {config.lr}")


main()
