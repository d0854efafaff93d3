"""The paper's theory, checked with numbers."""
