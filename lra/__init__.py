"""Long Range Arena: the benchmark of efficient attentions by Tay et al., on our models and modes."""
