package icehouse

import (
	"net/netip"
	"net/url"
	"regexp"
	"strings"
)

var (
	socketScheme = regexp.MustCompile(`(?i)^(unix|unix-abstract|vsock):`)
	// The scheme of a target, before its addresses.
	scheme = regexp.MustCompile(`(?i)^(dns|ipv4|ipv6|passthrough):(//[^/]*/)?`)
)

// isLocal reports whether all addresses of a gRPC target are this machine's. It resolves no names. A proxy elsewhere
// would look for the server on the proxy's own machine.
func isLocal(target string) bool {
	if socketScheme.MatchString(target) {
		return true
	}
	target = strings.TrimPrefix(target, scheme.FindString(target))
	if unescaped, err := url.PathUnescape(target); err == nil {
		target = unescaped
	}
	for place := range strings.SplitSeq(target, ",") {
		if !isLocalHost(hostOf(place)) {
			return false
		}
	}
	return true
}

// hostOf returns the host of "host:port", of "[::1]:port" and of either without a port.
func hostOf(place string) string {
	if inner, ok := strings.CutPrefix(place, "["); ok {
		host, _, _ := strings.Cut(inner, "]")
		return host
	}
	if strings.Count(place, ":") > 1 {
		return place
	}
	host, _, _ := strings.Cut(place, ":")
	return host
}

func isLocalHost(host string) bool {
	name := strings.TrimSuffix(strings.ToLower(host), ".")
	if name == "localhost" || strings.HasSuffix(name, ".localhost") {
		return true
	}
	address, err := netip.ParseAddr(name)
	// Connecting to the unspecified address reaches this machine.
	return err == nil && (address.Unmap().IsLoopback() || address.IsUnspecified())
}
