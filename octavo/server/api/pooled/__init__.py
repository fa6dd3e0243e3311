"""The routes of models that embed, classify and rerank."""
