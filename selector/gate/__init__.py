"""Fits the relevance gate.

background, phrases   everyday requests and phrases that come with the package
variations, wording   a question as people ask it; what looks like a task's question and is another
fitting_set           the questions of all tasks and everything else, varied
encoding              these as the model takes them; what a gate sees of them is `selector.backbone.token_values`
training              prototypes, floors, weights and thresholds
fit, refit            all of it; the rule alone
"""
