"""Fits the relevance gate.

background, phrases   everyday requests and phrases that come with the package
variations            a question as people ask it; what looks like a task's question and is another
fitting_set           the questions of all tasks and everything else, varied
token_values          what the gate sees of them: one layer's attention values of the tokens that decide
fit                   prototypes, weights and thresholds
"""
