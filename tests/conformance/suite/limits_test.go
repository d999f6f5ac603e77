package suite

import (
	"fmt"
	"os"
	"runtime"
	"time"

	"sigs.k8s.io/gateway-api/conformance/utils/config"
)

// maxExtension is the maximum factor by which time limits are extended.
const maxExtension = 8

// extension is the factor for time limits on a busy machine: the number of tasks that share a core, on average over the
// minute before the start.
var extension = func() float64 {
	text, err := os.ReadFile("/proc/loadavg")
	var tasks float64
	if err == nil {
		_, err = fmt.Sscanf(string(text), "%g ", &tasks)
	}
	if err != nil {
		// The machine counts as quiet.
		return 1
	}
	return min(max(tasks/float64(runtime.NumCPU()), 1), maxExtension)
}()

// extended returns a time limit that is meant for a quiet machine, extended while the machine is busy.
func extended(limit time.Duration) time.Duration {
	return time.Duration(float64(limit) * extension)
}

// extendLimits extends the limits that conformance leaves to the implementation. MaxTimeToConsistency is prescribed.
func extendLimits(limits *config.TimeoutConfig) {
	for _, limit := range []*time.Duration{
		&limits.CreateTimeout,
		&limits.DeleteTimeout,
		&limits.GetTimeout,
		&limits.GatewayMustHaveAddress,
		&limits.GatewayMustHaveCondition,
		&limits.GatewayStatusMustHaveListeners,
		&limits.GatewayListenersMustHaveConditions,
		&limits.ListenerSetMustHaveCondition,
		&limits.ListenerSetListenersMustHaveConditions,
		&limits.GWCMustBeAccepted,
		&limits.HTTPRouteMustNotHaveParents,
		&limits.HTTPRouteMustHaveCondition,
		&limits.TLSRouteMustHaveCondition,
		&limits.RouteMustHaveParents,
		&limits.NamespacesMustBeReady,
		&limits.LatestObservedGenerationSet,
		&limits.DefaultTestTimeout,
	} {
		*limit = extended(*limit)
	}
}
