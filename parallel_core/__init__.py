"""Parallel Diffusion without ComfyUI: plans, checkpoints, ranks and what they compute.

ComfyUI's process imports `plan`, `checkpoint`, `protocol`, `arena`, `launch`, `engine` and the declarations in
`families`; only ranks import `worker`, `parallelize`, `attention`, `placement` (they need diffusers).
"""
