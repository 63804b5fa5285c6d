"""Inside the GPU container: the SGLang plugin, its writer, the launcher and the CPU mode."""
