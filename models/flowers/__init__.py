"""Classification of flower photos, one folder per class: the Vertex AI codelab as a trainer."""
