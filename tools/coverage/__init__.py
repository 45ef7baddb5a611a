"""What patch_model does with every model type of transformers: see README.md."""
