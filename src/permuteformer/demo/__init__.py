"""An interactive page, served to this machine only: how positions work in a head, and the answers of a trained model."""
