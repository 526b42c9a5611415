"""Long Range Arena: the benchmark of efficient attentions by Tay et al., with our models and modes."""
