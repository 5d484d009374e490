"""The ComfyUI side: node schemas and the objects that stand for remote models. Knows no diffusers and no process."""
