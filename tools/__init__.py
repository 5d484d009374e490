"""What developers run: the environment, the demo, a client of a ComfyUI server. The package never imports it."""
