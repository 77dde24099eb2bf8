"""What commands share: runs, trained models, ranks, outputs, tables and pictures."""
