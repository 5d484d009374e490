"""The rank's side: main loop, closed table of operations, model store, meshes. Knows no ComfyUI."""
