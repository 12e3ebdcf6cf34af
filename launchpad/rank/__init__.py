"""What runs inside a user's rank."""
