"""A tiny hybrid of convolutions and attention, trained here: what memory teaches it, and what that costs."""
