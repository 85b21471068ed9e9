package icehouse

import (
	"bufio"
	"context"
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/health/grpc_health_v1"

	icehousev1 "icehouse.dev/api/icehouse/v1"
)

func TestWhichTargetsAreOfThisMachine(t *testing.T) {
	for _, target := range []string{
		"localhost", "localhost:1", "LocalHost:1", "localhost.:1", "a.localhost:1", "127.0.0.1", "127.9.9.9:1",
		"::1", "[::1]", "[::1]:1", "[::1%lo]:1", "[::ffff:127.0.0.1]:1", "0.0.0.0:1", "[::]:1", "dns:localhost:1",
		"dns://8.8.8.8/localhost:1", "ipv4:127.0.0.1:1,127.0.0.2:1", "ipv6:[::1]:1", "ipv6:%5B::1%5D:1",
		"unix:/a", "unix:///a", "unix:a", "unix-abstract:a", "passthrough:///127.0.0.1:1",
	} {
		if !isLocal(target) {
			t.Error(target)
		}
	}
	for _, target := range []string{
		"icehouse:1", "localhost.example:1", "notlocalhost:1", "127.0.0.1.example:1", "128.0.0.1:1", "[::2]:1", ":1",
		"ipv4:127.0.0.1:1,10.0.0.1:1", "xds:///localhost", "10.0.0.1", "dns:///icehouse:1", "[fe80::1]:1", "[",
	} {
		if isLocal(target) {
			t.Error(target)
		}
	}
}

// proxy starts a proxy that refuses every request, and returns the first lines of the requests.
func proxy(t *testing.T) (net.Listener, <-chan string) {
	listener, asked := listen(t), make(chan string, 100)
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			line, _ := bufio.NewReader(conn).ReadString('\n')
			asked <- strings.TrimSpace(line)
			_, _ = conn.Write([]byte("HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n"))
			_ = conn.Close()
		}
	}()
	return listener, asked
}

const proxyTarget = "ICEHOUSE_TEST_PROXY_TARGET"

// Go reads the proxy settings once in a process, so each target is called by a process of its own.
func TestOnlyAServerElsewhereIsAskedThroughAProxy(t *testing.T) {
	listener := listen(t)
	script := &scripted{states: []icehousev1.ServerState{ready}}
	serveOn(t, listener, script, grpc_health_v1.HealthCheckResponse_SERVING)
	_, port, _ := net.SplitHostPort(listener.Addr().String())
	for target, want := range map[string]string{
		"127.0.0.1:" + port:          "",
		"localhost:" + port:          "",
		"icehouse.localhost:" + port: "",
		"icehouse.invalid:50051":     "CONNECT icehouse.invalid:50051 HTTP/1.1",
	} {
		through, asked := proxy(t)
		test := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestAsksATarget$", "-test.timeout=60s")
		url := "http://" + through.Addr().String()
		test.Env = []string{proxyTarget + "=" + target, "HOME=" + t.TempDir()}
		for _, name := range []string{"grpc_proxy", "https_proxy", "http_proxy", "all_proxy"} {
			test.Env = append(test.Env, name+"="+url, strings.ToUpper(name)+"="+url)
		}
		output, err := test.CombinedOutput()
		got := ""
		select {
		case got = <-asked:
		default:
		}
		// Not every system has an address for the third target.
		isAnswered := err == nil || strings.HasPrefix(target, "icehouse.localhost")
		if got != want || isAnswered != (want == "") {
			t.Errorf("%s: %q was asked of the proxy: %s", target, got, output)
		}
	}
}

func TestAsksATarget(t *testing.T) {
	target := os.Getenv(proxyTarget)
	if target == "" {
		t.Skip("another test asks, in a process of its own")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if _, err := dial(t, target).Server.GetServer(ctx, &icehousev1.GetServerRequest{}); err != nil {
		t.Fatal(err)
	}
}
