"""Photos of flowers, one folder per class: the job of the Vertex AI codelab, as a trainer."""
