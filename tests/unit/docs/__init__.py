"""Tests of what makes pages of docs/, and of what pages say."""
