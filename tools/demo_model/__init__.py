"""Helpers of tools/train_demo_model.py: pictures, prompts, text encoders, VAE and transformer of the demo model."""
