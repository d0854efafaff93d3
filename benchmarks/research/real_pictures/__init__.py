"""Emoji as several vendors draw them: a stream of tasks about real pictures, and a small model that can see them.

Half of the concepts are base: some vendors' drawings teach the model (`train`) those. The tasks (`tasks`) are about
the other half, or ask for words that it was never taught. Pictures of test questions are drawn by a vendor of whom no
training picture is, for the model or for a task.
"""
