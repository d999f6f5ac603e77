package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// container is a container of a pod.
type container struct {
	pod  *pod
	spec *core.Container
	// isInit is true for init containers; those that run along with the pod are also sidecars.
	isInit, isSidecar bool
	// finished is closed once nothing starts the container again.
	finished chan struct{}

	mutex   sync.Mutex
	process *os.Process
	// ended is closed when the current process ends.
	ended    chan struct{}
	state    core.ContainerState
	last     core.ContainerState
	restarts int32
	// isStarted and isReady are the results of the probes.
	isStarted, isReady bool
	// sandbox is what exec commands have in common with the container.
	sandbox *sandbox
}

func newContainer(pod *pod, spec *core.Container, isInit, isSidecar bool) *container {
	waiting := core.ContainerState{Waiting: &core.ContainerStateWaiting{Reason: "PodInitializing"}}
	return &container{
		pod: pod, spec: spec, isInit: isInit, isSidecar: isSidecar, state: waiting, finished: make(chan struct{}),
	}
}

// supervise starts the container, and again after each end if the pod says so.
func (c *container) supervise(ctx context.Context) {
	defer close(c.finished)
	for {
		code, err := c.runOnce(ctx)
		if err != nil && ctx.Err() == nil {
			c.pod.agent.report(fmt.Sprintf("container %s of pod %s", c.spec.Name, c.pod.name()), err)
		}
		if ctx.Err() != nil || !c.restartsAfter(code, err) {
			return
		}
		if !sleep(ctx, restartDelay) {
			return
		}
		c.mutex.Lock()
		c.restarts++
		c.mutex.Unlock()
	}
}

// restartsAfter reports whether the container starts again.
func (c *container) restartsAfter(code int, err error) bool {
	policy := c.pod.object.Spec.RestartPolicy
	switch {
	case c.isSidecar:
		return true
	case c.isInit || policy == core.RestartPolicyOnFailure:
		return (code != 0 || err != nil) && policy != core.RestartPolicyNever
	default:
		return policy == core.RestartPolicyAlways
	}
}

// runOnce runs the program to its end.
func (c *container) runOnce(ctx context.Context) (int, error) {
	box, err := c.newSandbox(ctx)
	if err != nil {
		c.set(func() {
			c.state = core.ContainerState{Waiting: &core.ContainerStateWaiting{
				Reason: "CreateContainerError", Message: err.Error(),
			}}
		})
		return 1, err
	}
	path := filepath.Join(c.pod.folder(), c.spec.Name+".json")
	text, err := json.Marshal(box)
	if err != nil {
		return 1, err
	}
	if err := os.WriteFile(path, text, 0o600); err != nil {
		return 1, err
	}
	log := c.pod.agent.log(c.pod.object, c.spec.Name)
	if err := os.MkdirAll(filepath.Dir(log), 0o755); err != nil {
		return 1, err
	}
	output, err := os.OpenFile(log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return 1, err
	}
	defer output.Close()
	command := exec.Command("/proc/self/exe", Container, path)
	command.Stdout, command.Stderr, command.Env = output, output, []string{}
	command.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWUTS,
	}
	if ctx.Err() != nil {
		return 1, ctx.Err()
	}
	if err := c.pod.space.enter(command.Start); err != nil {
		return 1, err
	}
	ended := make(chan struct{})
	started := meta.Now()
	c.set(func() {
		c.process, c.ended, c.sandbox = command.Process, ended, box
		c.state = core.ContainerState{Running: &core.ContainerStateRunning{StartedAt: started}}
		c.isStarted, c.isReady = c.spec.StartupProbe == nil, false
	})
	probing, cancel := context.WithCancel(context.Background())
	go c.probe(probing)
	err = command.Wait()
	cancel()
	code := command.ProcessState.ExitCode()
	reason := "Completed"
	if code != 0 {
		reason = "Error"
	}
	c.set(func() {
		c.process, c.isStarted, c.isReady = nil, false, false
		c.last = core.ContainerState{Terminated: &core.ContainerStateTerminated{
			ExitCode: int32(code), Reason: reason, StartedAt: started, FinishedAt: meta.Now(),
		}}
		c.state = c.last
	})
	close(ended)
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		err = nil
	}
	return code, err
}

// set changes the state and reports the change.
func (c *container) set(change func()) {
	c.mutex.Lock()
	change()
	c.mutex.Unlock()
	c.pod.notify()
}

// wait waits until the next container may start.
func (c *container) wait(ctx context.Context) bool {
	for {
		c.mutex.Lock()
		isStarted := c.isSidecar && c.isStarted && c.process != nil
		c.mutex.Unlock()
		if isStarted {
			return true
		}
		select {
		case <-ctx.Done():
			return false
		case <-c.finished:
			c.mutex.Lock()
			defer c.mutex.Unlock()
			return c.state.Terminated != nil && c.state.Terminated.ExitCode == 0
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// stop ends the current process, at the latest at the deadline.
func (c *container) stop(deadline time.Time) {
	c.mutex.Lock()
	process, ended := c.process, c.ended
	c.mutex.Unlock()
	if process == nil {
		return
	}
	_ = process.Signal(syscall.SIGTERM)
	select {
	case <-ended:
		return
	case <-time.After(time.Until(deadline)):
	}
	_ = process.Kill()
	<-ended
}

// status returns the status of the container.
func (c *container) status() core.ContainerStatus {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	isStarted := c.isStarted
	status := core.ContainerStatus{
		Name: c.spec.Name, Image: c.spec.Image, ImageID: c.spec.Image, State: c.state, RestartCount: c.restarts,
		Started: &isStarted, Ready: c.isReady,
	}
	if c.isInit && !c.isSidecar {
		status.Ready = c.state.Terminated != nil && c.state.Terminated.ExitCode == 0
	}
	if c.restarts > 0 {
		status.LastTerminationState = c.last
	}
	status.ContainerID = fmt.Sprintf("process://%s/%s", c.pod.object.UID, c.spec.Name)
	return status
}

// command returns a command that runs inside the container.
func (c *container) command(arguments []string) (*exec.Cmd, error) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	if c.process == nil {
		return nil, fmt.Errorf("container %s of pod %s does not run", c.spec.Name, c.pod.name())
	}
	if len(arguments) == 0 {
		return nil, errors.New("no command")
	}
	base := []string{"--target", fmt.Sprint(c.process.Pid), "--mount", "--uts", "--net", "--pid", "--root", "--wdns=/",
		"--setuid", fmt.Sprint(c.sandbox.User), "--setgid", fmt.Sprint(c.sandbox.Group), "--"}
	command := exec.Command("nsenter", append(base, arguments...)...)
	command.Env = c.sandbox.Environment
	return command, nil
}

// image returns the program of the container.
func (c *container) image() (Image, error) {
	name := c.spec.Image[strings.LastIndex(c.spec.Image, "/")+1:]
	name, _, _ = strings.Cut(name, "@")
	name, _, _ = strings.Cut(name, ":")
	image, ok := c.pod.agent.Images[name]
	if !ok {
		return Image{}, fmt.Errorf("no program replaces image %q", c.spec.Image)
	}
	return image, nil
}
