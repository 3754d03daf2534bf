"""What uses a trained model: search, engine, translator, HTTP service, export."""
