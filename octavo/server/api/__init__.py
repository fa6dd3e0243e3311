"""The routes: requests, answers, and how one becomes the other."""
