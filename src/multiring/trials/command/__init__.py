"""Studies of scripts that were not written for trials: `multiring trials run study.toml -- python train.py`.

Each trial is a job of its own with fresh ranks. The study lives in the command's process, which is no rank.
"""
