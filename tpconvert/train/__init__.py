"""Train a folder of rank files: ``torchrun --nproc-per-node N -m tpconvert.train DIR --config C.yaml``."""
