"""Heads of a target model that draft its next tokens: EAGLE, Medusa, and layers for multi-token prediction."""
