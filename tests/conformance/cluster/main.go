// Command cluster runs a Kubernetes cluster as processes in namespaces of its own: etcd, the API server, the controller
// manager and pods, with istiod installed by its charts. It then runs a command inside and ends everything with it.
//
//	cluster run -tools .tools -istiod target/debug/istiod -charts charts -folder target/conformance -- COMMAND ARGUMENT…
//
// The same binary is also the program of containers whose images it replaces.
package main

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"

	"conformance/agent"
	"conformance/echo"
	"conformance/proxy"
)

// The first thread belongs to the main goroutine. Another one might move it into the namespace of a pod, where it would
// stay, and the namespaces of a process are those of its first thread.
func init() {
	runtime.LockOSThread()
}

func main() {
	// A container runs this binary under the name of the program that it replaces.
	commands := map[string]func([]string) error{
		"run":           run,
		"inside":        inside,
		agent.Container: agent.RunContainer,
		"pilot-agent":   proxy.Main,
		"echo":          echo.Serve,
		"client":        echo.Client,
	}
	arguments := os.Args[1:]
	command, ok := commands[filepath.Base(os.Args[0])]
	if !ok && len(arguments) > 0 {
		command, ok = commands[arguments[0]]
		arguments = arguments[1:]
	}
	if !ok {
		fmt.Fprintln(os.Stderr, "usage: cluster run [FLAG…] [-- COMMAND ARGUMENT…]")
		os.Exit(2)
	}
	if err := command(arguments); err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(1)
	}
}
