"""Components and plugins: which are installed, which ones a job activates, and the record of them."""
