"""The whole server under load: refusals, stalled readers, storms of cancels, stuck steps, stops."""
