"""`icehouse chat`: a conversation with a served model."""
