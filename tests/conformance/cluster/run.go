package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// options are the flags of `run`.
type options struct {
	tools, istiod, charts, folder string
	values                        list
	command                       []string
}

// list is a flag that may be repeated.
type list []string

func (l *list) String() string { return strings.Join(*l, ",") }

func (l *list) Set(value string) error {
	*l = append(*l, value)
	return nil
}

func parse(arguments []string) (*options, error) {
	var o options
	flags := flag.NewFlagSet("cluster", flag.ContinueOnError)
	flags.StringVar(&o.tools, "tools", ".tools", "folder with the components")
	flags.StringVar(&o.istiod, "istiod", "", "binary of istiod; without it, no mesh is installed")
	flags.StringVar(&o.charts, "charts", "charts", "folder with the charts")
	flags.StringVar(&o.folder, "folder", "", "folder for logs and state; it is emptied first")
	flags.Var(&o.values, "set", "value of the chart istiod, as `name=value`; may be repeated")
	if err := flags.Parse(arguments); err != nil {
		return nil, err
	}
	o.command = flags.Args()
	if o.folder == "" {
		return nil, errors.New("-folder is missing")
	}
	for _, path := range []*string{&o.tools, &o.istiod, &o.charts, &o.folder} {
		if *path == "" {
			continue
		}
		absolute, err := filepath.Abs(*path)
		if err != nil {
			return nil, err
		}
		*path = absolute
	}
	return &o, nil
}

// run starts this program again in new network, mount and process namespaces, so that nothing survives it.
func run(arguments []string) error {
	o, err := parse(arguments)
	if err != nil {
		return err
	}
	if err := os.RemoveAll(o.folder); err != nil {
		return err
	}
	if err := os.MkdirAll(o.folder, 0o755); err != nil {
		return err
	}
	// The kernel kills the child when the thread that started it ends, which is the first one.
	child := exec.Command("/proc/self/exe", append([]string{"inside"}, arguments...)...)
	child.Stdin, child.Stdout, child.Stderr = os.Stdin, os.Stdout, os.Stderr
	child.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWNS | syscall.CLONE_NEWPID,
		Pdeathsig:  syscall.SIGKILL,
	}
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM)
	if err := child.Start(); err != nil {
		return fmt.Errorf("namespaces cannot be created: %w", err)
	}
	identity := []byte(strconv.Itoa(child.Process.Pid) + "\n")
	if err := os.WriteFile(filepath.Join(o.folder, "pid"), identity, 0o644); err != nil {
		return err
	}
	go func() {
		for range signals {
			_ = child.Process.Kill()
		}
	}()
	err = child.Wait()
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.ExitCode() > 0 {
		os.Exit(exit.ExitCode())
	}
	return err
}
