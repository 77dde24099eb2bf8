"""Components and plugins: what is installed, what a job activates, and the record of it."""
