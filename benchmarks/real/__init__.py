"""A real pretrained model and real data, from what installed packages ship. Nothing is fetched."""
