package echo

import (
	"context"
	"crypto/tls"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// timeout is the time limit of a request.
const timeout = 10 * time.Second

// Client sends requests: `client URL [--method=M] [-H NAME:VALUE]… [--count=N]`. It follows no redirects.
func Client(arguments []string) error {
	if len(arguments) == 0 {
		return errors.New("usage: client URL [FLAG…]")
	}
	var headers ports
	flags := flag.NewFlagSet("client", flag.ContinueOnError)
	verb := flags.String("method", http.MethodGet, "HTTP method")
	count := flags.Int("count", 1, "number of requests")
	flags.Var(&headers, "H", "header as `NAME:VALUE`; may be repeated")
	if err := flags.Parse(arguments[1:]); err != nil {
		return err
	}
	target, err := url.Parse(arguments[0])
	if err != nil {
		return err
	}
	for number := range *count {
		ctx, cancel := context.WithTimeout(context.Background(), timeout)
		text, err := send(ctx, target, *verb, headers)
		cancel()
		if err != nil {
			return err
		}
		// A blank line separates responses.
		fmt.Printf("[%d] Url=%s\n%s\n", number, target, text)
	}
	return nil
}

func send(ctx context.Context, target *url.URL, verb string, headers []string) (string, error) {
	if target.Scheme == "grpc" {
		return call(ctx, target.Host, headers)
	}
	request, err := http.NewRequestWithContext(ctx, verb, target.String(), nil)
	if err != nil {
		return "", err
	}
	for _, header := range headers {
		name, value, _ := strings.Cut(header, ":")
		if strings.EqualFold(name, "host") {
			request.Host = value
			continue
		}
		request.Header.Add(name, value)
	}
	client := &http.Client{
		Transport: &http.Transport{
			DisableKeepAlives: true, DisableCompression: true, TLSClientConfig: &tls.Config{InsecureSkipVerify: true},
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	response, err := client.Do(request)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		return "", err
	}
	text := fmt.Sprintf("StatusCode=%d\n", response.StatusCode)
	for name, values := range response.Header {
		for _, value := range values {
			text += fmt.Sprintf("ResponseHeader=%s:%s\n", name, value)
		}
	}
	return text + inside(string(body)), nil
}

// call calls the gRPC method. Its response has the status of HTTP.
func call(ctx context.Context, host string, headers []string) (string, error) {
	connection, err := grpc.NewClient("passthrough:///"+host, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return "", err
	}
	defer connection.Close()
	for _, header := range headers {
		name, value, _ := strings.Cut(header, ":")
		ctx = metadata.AppendToOutgoingContext(ctx, name, value)
	}
	var response wrapperspb.StringValue
	if err := connection.Invoke(ctx, "/"+service+"/"+method, wrapperspb.String(""), &response); err != nil {
		return "", err
	}
	return "StatusCode=200\n" + inside(response.Value), nil
}

// inside marks the lines of a body.
func inside(body string) string {
	var text strings.Builder
	for line := range strings.Lines(body) {
		if line = strings.TrimSpace(line); line != "" {
			fmt.Fprintf(&text, "[body] %s\n", line)
		}
	}
	return text.String()
}
