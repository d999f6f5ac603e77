package agent

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	core "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/errors"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// restartDelay is the time between the end of a container and its next start.
const restartDelay = time.Second

// pod is a pod on the node.
type pod struct {
	agent *Agent
	// object is the pod as it was when it was seen first.
	object  *core.Pod
	started time.Time

	space      *namespace
	volumes    map[string]string
	containers []*container

	changed chan struct{}
	ending  chan struct{}

	mutex sync.Mutex
	// grace is the time that the containers have to end.
	grace time.Duration
	// failure is why the pod cannot start yet.
	failure string
	// done is true once the pod needs no more status.
	done bool
	// conditions are those last written.
	conditions []core.PodCondition
}

func newPod(agent *Agent, object *core.Pod) *pod {
	p := &pod{
		agent: agent, object: object, started: time.Now(),
		changed: make(chan struct{}, 1), ending: make(chan struct{}),
	}
	for index := range object.Spec.InitContainers {
		spec := &object.Spec.InitContainers[index]
		isSidecar := spec.RestartPolicy != nil && *spec.RestartPolicy == core.ContainerRestartPolicyAlways
		p.containers = append(p.containers, newContainer(p, spec, true, isSidecar))
	}
	for index := range object.Spec.Containers {
		p.containers = append(p.containers, newContainer(p, &object.Spec.Containers[index], false, false))
	}
	return p
}

func (p *pod) name() string {
	return p.object.Namespace + "/" + p.object.Name
}

func (p *pod) folder() string {
	return filepath.Join(p.agent.Folder, "pods", string(p.object.UID))
}

// notify reports that the status may have changed.
func (p *pod) notify() {
	select {
	case p.changed <- struct{}{}:
	default:
	}
}

// end ends the pod, whose object says how much time it has.
func (p *pod) end(object *core.Pod) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	p.grace = 30 * time.Second
	if seconds := object.DeletionGracePeriodSeconds; seconds != nil {
		p.grace = time.Duration(*seconds) * time.Second
	}
	select {
	case <-p.ending:
	default:
		close(p.ending)
	}
}

// run runs the pod until it has ended, and removes its object.
func (p *pod) run(ctx context.Context) {
	alive, cancel := context.WithCancel(ctx)
	defer cancel()
	go p.reportStatus(ctx)
	startup := make(chan struct{})
	go func() {
		defer close(startup)
		p.start(alive)
	}()
	select {
	case <-ctx.Done():
		return
	case <-p.ending:
	}
	p.notify()
	// No container starts from now on.
	cancel()
	<-startup
	p.mutex.Lock()
	deadline := time.Now().Add(p.grace)
	p.mutex.Unlock()
	// Sidecars end after the containers that use them, in reverse order.
	var ended sync.WaitGroup
	for _, one := range p.containers {
		if !one.isInit {
			ended.Go(func() { one.stop(deadline) })
		}
	}
	ended.Wait()
	for _, one := range slices.Backward(p.containers) {
		one.stop(deadline)
	}
	p.mutex.Lock()
	p.done = true
	p.mutex.Unlock()
	if p.space != nil {
		p.agent.Network.detach(p.space)
	}
	_ = os.RemoveAll(p.folder())
	now := int64(0)
	options := meta.DeleteOptions{GracePeriodSeconds: &now, Preconditions: meta.NewUIDPreconditions(string(p.object.UID))}
	err := p.agent.Client.CoreV1().Pods(p.object.Namespace).Delete(ctx, p.object.Name, options)
	if err != nil && !errors.IsNotFound(err) && !errors.IsConflict(err) {
		p.agent.report("removal of pod "+p.name(), err)
	}
}

// start starts the containers in their order.
func (p *pod) start(ctx context.Context) {
	settings := map[string]string{}
	if security := p.object.Spec.SecurityContext; security != nil {
		for _, one := range security.Sysctls {
			settings[one.Name] = one.Value
		}
	}
	space, err := p.agent.Network.attach(settings)
	if err != nil {
		p.fail(err)
		p.agent.report("network of pod "+p.name(), err)
		return
	}
	p.mutex.Lock()
	p.space = space
	p.mutex.Unlock()
	for {
		volumes, err := p.mountAll(ctx)
		if err == nil {
			p.fail(nil)
			p.volumes = volumes
			break
		}
		// For example, a ConfigMap may not exist yet.
		p.fail(err)
		if !sleep(ctx, restartDelay) {
			return
		}
	}
	for _, one := range p.containers {
		go one.supervise(ctx)
		if one.isInit && !one.wait(ctx) {
			return
		}
	}
}

// fail records why the pod cannot start; nil if it can.
func (p *pod) fail(err error) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	p.failure = ""
	if err != nil {
		p.failure = err.Error()
	}
	p.notify()
}

// reportStatus writes the status after each change.
func (p *pod) reportStatus(ctx context.Context) {
	var written string
	for {
		p.mutex.Lock()
		done := p.done
		p.mutex.Unlock()
		if done {
			return
		}
		status := p.status()
		text, err := json.Marshal(map[string]any{"metadata": map[string]any{"uid": p.object.UID}, "status": status})
		if err == nil && string(text) != written {
			_, err = p.agent.Client.CoreV1().Pods(p.object.Namespace).Patch(ctx, p.object.Name,
				types.MergePatchType, text, meta.PatchOptions{}, "status")
			switch {
			case err == nil:
				written = string(text)
			case errors.IsNotFound(err) || errors.IsConflict(err):
				return
			default:
				p.agent.report("status of pod "+p.name(), err)
				time.AfterFunc(restartDelay, p.notify)
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-p.changed:
		}
	}
}

// status returns the current status.
func (p *pod) status() core.PodStatus {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	started := meta.NewTime(p.started)
	status := core.PodStatus{
		Phase: core.PodPending, HostIP: p.agent.Network.Node, HostIPs: []core.HostIP{{IP: p.agent.Network.Node}},
		StartTime: &started, Message: p.failure,
	}
	if p.space != nil {
		status.PodIP, status.PodIPs = p.space.address, []core.PodIP{{IP: p.space.address}}
	}
	isEnding := false
	select {
	case <-p.ending:
		isEnding = true
	default:
	}
	initialized, ready, allEnded, failed := true, !isEnding, true, false
	for _, one := range p.containers {
		state := one.status()
		if one.isInit {
			status.InitContainerStatuses = append(status.InitContainerStatuses, state)
		} else {
			status.ContainerStatuses = append(status.ContainerStatuses, state)
		}
		switch {
		case one.isInit && !one.isSidecar:
			initialized = initialized && state.State.Terminated != nil && state.State.Terminated.ExitCode == 0
		case one.isSidecar:
			initialized = initialized && state.Started != nil && *state.Started
			ready = ready && state.Ready
		default:
			ready = ready && state.Ready
			allEnded = allEnded && state.State.Terminated != nil
			failed = failed || state.State.Terminated != nil && state.State.Terminated.ExitCode != 0
			if state.State.Running != nil {
				status.Phase = core.PodRunning
			}
		}
	}
	if allEnded && p.object.Spec.RestartPolicy != core.RestartPolicyAlways {
		status.Phase, ready = core.PodSucceeded, false
		if failed {
			status.Phase = core.PodFailed
		}
	}
	for _, condition := range []struct {
		kind  core.PodConditionType
		value bool
	}{
		{core.PodScheduled, true}, {core.PodReadyToStartContainers, p.space != nil}, {core.PodInitialized, initialized},
		{core.ContainersReady, ready && initialized}, {core.PodReady, ready && initialized},
	} {
		value := core.ConditionFalse
		if condition.value {
			value = core.ConditionTrue
		}
		status.Conditions = append(status.Conditions, p.condition(condition.kind, value))
	}
	p.conditions = status.Conditions
	return status
}

// condition returns a condition with the time at which its value changed.
func (p *pod) condition(kind core.PodConditionType, value core.ConditionStatus) core.PodCondition {
	for _, known := range p.conditions {
		if known.Type == kind && known.Status == value {
			return known
		}
	}
	return core.PodCondition{
		Type: kind, Status: value, LastTransitionTime: meta.Now(), ObservedGeneration: p.object.Generation,
	}
}

// container returns a container by its name; the first one without a name.
func (p *pod) container(name string) (*container, error) {
	for _, one := range p.containers {
		if one.spec.Name == name || name == "" && !one.isInit {
			return one, nil
		}
	}
	return nil, fmt.Errorf("pod %s has no container %s", p.name(), name)
}
