package agent

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os/exec"
	"strconv"
	"strings"
	"time"

	core "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// startupInterval is the period of startup probes. Those of pods are meant for slow machines.
const startupInterval = 100 * time.Millisecond

// probe runs the startup probe and then the readiness probe of the current process. Liveness probes are not run: no
// program of the tests needs to be killed, and on a busy machine they would do that.
func (c *container) probe(ctx context.Context) {
	if probe := c.spec.StartupProbe; probe != nil {
		for c.check(ctx, probe) != nil {
			if !sleep(ctx, startupInterval) {
				return
			}
		}
		c.set(func() { c.isStarted = true })
	}
	probe := c.spec.ReadinessProbe
	if probe == nil {
		c.result(ctx, true)
		return
	}
	var failures int32
	isReady := false
	for ctx.Err() == nil {
		err := c.check(ctx, probe)
		if err == nil {
			failures = 0
		} else {
			failures++
		}
		if next := err == nil || isReady && failures < max(probe.FailureThreshold, 1); next != isReady {
			isReady = next
			c.result(ctx, isReady)
		}
		pause := time.Duration(max(probe.PeriodSeconds, 1)) * time.Second
		if !isReady {
			pause = startupInterval
		}
		if !sleep(ctx, pause) {
			return
		}
	}
}

// result records whether the process is ready, unless it has ended.
func (c *container) result(ctx context.Context, isReady bool) {
	c.set(func() {
		if ctx.Err() == nil {
			c.isReady = isReady
		}
	})
}

// check probes once.
func (c *container) check(ctx context.Context, probe *core.Probe) error {
	timeout := time.Duration(max(probe.TimeoutSeconds, 1)) * time.Second
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	address := c.pod.space.address
	switch {
	case probe.HTTPGet != nil:
		get := probe.HTTPGet
		port, err := c.port(get.Port)
		if err != nil {
			return err
		}
		host := address
		if get.Host != "" {
			host = get.Host
		}
		scheme := strings.ToLower(string(get.Scheme))
		if scheme == "" {
			scheme = "http"
		}
		url := fmt.Sprintf("%s://%s/%s", scheme, net.JoinHostPort(host, port), strings.TrimPrefix(get.Path, "/"))
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
		if err != nil {
			return err
		}
		for _, header := range get.HTTPHeaders {
			request.Header.Add(header.Name, header.Value)
		}
		// The kubelet does not verify certificates, either.
		transport := &http.Transport{DisableKeepAlives: true, TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}
		response, err := (&http.Client{Transport: transport}).Do(request)
		if err != nil {
			return err
		}
		defer response.Body.Close()
		if response.StatusCode < 200 || response.StatusCode >= 400 {
			return errors.New(response.Status)
		}
		return nil
	case probe.TCPSocket != nil:
		port, err := c.port(probe.TCPSocket.Port)
		if err != nil {
			return err
		}
		connection, err := (&net.Dialer{}).DialContext(ctx, "tcp", net.JoinHostPort(address, port))
		if err != nil {
			return err
		}
		return connection.Close()
	case probe.Exec != nil:
		command, err := c.command(probe.Exec.Command)
		if err != nil {
			return err
		}
		return runUntil(ctx, command)
	}
	return errors.New("the node agent does not implement the type of the probe")
}

// runUntil runs a command to its end, or kills it when the context ends.
func runUntil(ctx context.Context, command *exec.Cmd) error {
	if err := command.Start(); err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = command.Process.Kill() })
	defer stop()
	return command.Wait()
}

// port returns the number of a port of the container.
func (c *container) port(port intstr.IntOrString) (string, error) {
	if port.Type == intstr.Int {
		return strconv.Itoa(port.IntValue()), nil
	}
	for _, known := range c.spec.Ports {
		if known.Name == port.StrVal {
			return strconv.Itoa(int(known.ContainerPort)), nil
		}
	}
	return "", fmt.Errorf("no port %q", port.StrVal)
}
