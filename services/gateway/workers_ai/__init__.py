"""Workers AI's own dialect: `ai/run` for both families of models, its envelope, its error codes, its batches."""
