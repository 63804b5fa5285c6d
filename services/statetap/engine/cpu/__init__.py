"""Real SGLang on a host without a GPU: for tests, the demo, and anybody who wants to try it."""
