// Command coredns is CoreDNS with the plugins that the cluster and the suite use. All plugins of its releases would
// take minutes to compile.
package main

import (
	"github.com/coredns/coredns/coremain"

	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/forward"
	_ "github.com/coredns/coredns/plugin/kubernetes"
	_ "github.com/coredns/coredns/plugin/log"
	_ "github.com/coredns/coredns/plugin/ready"
	_ "github.com/coredns/coredns/plugin/whoami"

	"github.com/coredns/coredns/core/dnsserver"
)

func main() {
	// The order of the plugins of a server block.
	dnsserver.Directives = []string{"ready", "log", "errors", "kubernetes", "forward", "whoami"}
	coremain.Run()
}
