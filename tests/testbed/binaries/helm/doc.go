// Package helm pins the Helm that the tests run.
package helm
