// The one program of the test bed's own image: a sandbox that waits (no argument), a small web server (serve ADDRESS),
// and a client (get URL) that shows the pod's service-account token where one is mounted.
package main

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"
)

const account = "/var/run/secrets/kubernetes.io/serviceaccount/"

func main() {
	if len(os.Args) == 1 {
		wait()
		return
	}
	var err error
	switch {
	case len(os.Args) == 3 && os.Args[1] == "serve":
		err = serve(os.Args[2])
	case len(os.Args) == 3 && os.Args[1] == "get":
		err = get(os.Args[2])
	default:
		err = fmt.Errorf("usage: testpod [serve ADDRESS | get URL]")
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// wait is what a sandbox does: it holds the pod's namespaces and reaps orphans until it is told to end.
func wait() {
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGCHLD)
	for received := range signals {
		if received != syscall.SIGCHLD {
			return
		}
		for {
			if pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil); pid <= 0 || err != nil {
				break
			}
		}
	}
}

func serve(address string) error {
	host, _ := os.Hostname()
	http.HandleFunc("/", func(answer http.ResponseWriter, request *http.Request) {
		fmt.Printf("%s %s\n", request.Method, request.URL.Path)
		fmt.Fprintf(answer, "hello from %s\n", host)
	})
	fmt.Printf("serving on %s\n", address)
	return http.ListenAndServe(address, nil)
}

func get(url string) error {
	request, err := http.NewRequest(http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	transport := &http.Transport{}
	if authority, err := os.ReadFile(account + "ca.crt"); err == nil {
		pool := x509.NewCertPool()
		pool.AppendCertsFromPEM(authority)
		transport.TLSClientConfig = &tls.Config{RootCAs: pool}
	}
	if token, err := os.ReadFile(account + "token"); err == nil && strings.HasPrefix(url, "https:") {
		request.Header.Set("Authorization", "Bearer "+string(token))
	}
	answer, err := (&http.Client{Transport: transport, Timeout: 10 * time.Second}).Do(request)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	fmt.Println(answer.Status)
	_, err = io.Copy(os.Stdout, answer.Body)
	return err
}
