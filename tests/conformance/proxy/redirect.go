package proxy

import (
	"fmt"
	"strings"

	"conformance/agent"
)

// iptables is where the container has iptables.
const iptables = "/app/iptables"

// hbone is the port of HBONE, which is not redirected.
const hbone = "15008"

// redirect sets the rules that `istio-iptables` sets for these arguments. Arguments that it does not implement are
// errors.
func redirect(arguments []string) error {
	var outbound, inbound, user string
	excludedInbound := []string{hbone}
	var excludedOutbound, excludedRanges []string
	list := func(text string) []string {
		return strings.FieldsFunc(text, func(r rune) bool { return r == ',' })
	}
	for index := 0; index < len(arguments); index++ {
		flag := arguments[index]
		if strings.HasPrefix(flag, "--log_output_level=") {
			continue
		}
		index++
		if index == len(arguments) {
			return fmt.Errorf("%s has no value", flag)
		}
		value := arguments[index]
		switch {
		case flag == "-p":
			outbound = value
		case flag == "-z":
			inbound = value
		case flag == "-u":
			user = value
		case flag == "-x":
			excludedRanges = list(value)
		case flag == "-o":
			excludedOutbound = list(value)
		case flag == "-d":
			excludedInbound = append(excludedInbound, list(value)...)
		case flag == "-m" && value == "REDIRECT", (flag == "-i" || flag == "-b") && value == "*":
		default:
			return fmt.Errorf("%s %s is not implemented", flag, value)
		}
	}
	var excluded strings.Builder
	for _, one := range excludedRanges {
		fmt.Fprintf(&excluded, "-A ISTIO_OUTPUT -d %s -j RETURN\n", one)
	}
	for _, one := range excludedOutbound {
		fmt.Fprintf(&excluded, "-A ISTIO_OUTPUT -p tcp --dport %s -j RETURN\n", one)
	}
	rules := strings.NewReplacer("{outbound}", outbound, "{inbound}", inbound, "{user}", user, "{hbone}", hbone,
		"{excluded-inbound}", strings.Join(excludedInbound, ","), "{excluded}\n", excluded.String()).Replace(template)
	return agent.Restore(iptables, rules)
}

// template has the rules. A pod that calls its own address passes both redirections.
const template = `*nat
:ISTIO_INBOUND - [0:0]
:ISTIO_IN_REDIRECT - [0:0]
:ISTIO_OUTPUT - [0:0]
:ISTIO_REDIRECT - [0:0]
-A PREROUTING -p tcp -j ISTIO_INBOUND
-A OUTPUT -p tcp -j ISTIO_OUTPUT
-A ISTIO_INBOUND -p tcp -m multiport --dports {excluded-inbound} -j RETURN
-A ISTIO_INBOUND -p tcp -j ISTIO_IN_REDIRECT
-A ISTIO_IN_REDIRECT -p tcp -j REDIRECT --to-ports {inbound}
-A ISTIO_OUTPUT -s 127.0.0.6/32 -o lo -j RETURN
-A ISTIO_OUTPUT ! -d 127.0.0.1/32 -o lo -p tcp -m tcp ! --dport {hbone} -m owner --uid-owner {user} -j ISTIO_IN_REDIRECT
-A ISTIO_OUTPUT -o lo -m owner ! --uid-owner {user} -j RETURN
-A ISTIO_OUTPUT -m owner --uid-owner {user} -j RETURN
-A ISTIO_OUTPUT -d 127.0.0.1/32 -j RETURN
{excluded}
-A ISTIO_OUTPUT -p tcp -j ISTIO_REDIRECT
-A ISTIO_REDIRECT -p tcp -j REDIRECT --to-ports {outbound}
COMMIT
`
