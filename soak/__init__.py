"""What a long run meets: kills, full disks, lost workers, damaged files. A part a file; ``python -m soak`` runs them."""
