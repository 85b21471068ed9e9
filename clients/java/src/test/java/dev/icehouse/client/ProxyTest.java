package dev.icehouse.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import dev.icehouse.v1.GenerateRequest;
import dev.icehouse.v1.Prompt;
import io.grpc.health.v1.HealthCheckResponse.ServingStatus;
import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.net.InetAddress;
import java.net.InetSocketAddress;
import java.net.Proxy;
import java.net.ProxySelector;
import java.net.ServerSocket;
import java.net.SocketAddress;
import java.net.URI;
import java.nio.charset.StandardCharsets;
import java.util.List;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.LinkedBlockingQueue;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.ValueSource;

/** Proxies that the machine is set up for: asked for servers elsewhere, never for one on this machine. */
@Timeout(60)
class ProxyTest {
  private static final Prompt PROMPT = Prompt.newBuilder().setText("Hi").build();
  private static final GenerateRequest REQUEST = GenerateRequest.newBuilder().setPrompt(PROMPT).build();

  /** A proxy that refuses everybody, and which Java asks for every address until it is closed. */
  private static final class RefusingProxy extends ProxySelector implements AutoCloseable {
    final BlockingQueue<String> asked = new LinkedBlockingQueue<>();
    private final ServerSocket socket = new ServerSocket(0, 50, InetAddress.getLoopbackAddress());
    private final ProxySelector before = ProxySelector.getDefault();

    RefusingProxy() throws IOException {
      var thread = new Thread(this::serve, "proxy");
      thread.setDaemon(true);
      thread.start();
      ProxySelector.setDefault(this);
    }

    private void serve() {
      while (!socket.isClosed()) {
        try (var connection = socket.accept()) {
          var reader =
              new BufferedReader(new InputStreamReader(connection.getInputStream(), StandardCharsets.ISO_8859_1));
          asked.add(String.valueOf(reader.readLine()));
          connection.getOutputStream().write("HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n".getBytes());
        } catch (IOException e) {
          // Closed, or whoever asked is gone.
        }
      }
    }

    @Override
    public List<Proxy> select(URI uri) {
      var address = new InetSocketAddress(InetAddress.getLoopbackAddress(), socket.getLocalPort());
      return List.of(new Proxy(Proxy.Type.HTTP, address));
    }

    @Override
    public void connectFailed(URI uri, SocketAddress address, IOException failure) {}

    @Override
    public void close() throws IOException {
      ProxySelector.setDefault(before);
      socket.close();
    }
  }

  @ParameterizedTest
  @ValueSource(strings = {"127.0.0.1", "localhost", "dns:///localhost"})
  void aServerOnThisMachineIsAskedItself(String host) throws Exception {
    try (var proxy = new RefusingProxy();
        var server = new ScriptedServer(ServingStatus.SERVING);
        var client = IcehouseClient.connect(host + ":" + server.port())) {
      assertEquals("done", client.generate(REQUEST).getText());
      assertTrue(proxy.asked.isEmpty(), proxy.asked.toString());
    }
  }

  @Test
  void oneElsewhereIsAskedThroughTheProxy() throws Exception {
    try (var proxy = new RefusingProxy();
        var client = IcehouseClient.connect("icehouse.invalid:50051")) {
      assertThrows(IcehouseException.class, () -> client.generate(REQUEST));
      assertEquals("CONNECT icehouse.invalid:50051 HTTP/1.1", proxy.asked.take());
    }
  }

  @ParameterizedTest
  @ValueSource(
      strings = {
        "localhost", "localhost:1", "LocalHost:1", "localhost.:1", "a.localhost:1", "127.0.0.1", "127.9.9.9:1",
        "::1", "[::1]", "[::1]:1", "[::1%lo]:1", "[::ffff:127.0.0.1]:1", "0.0.0.0:1", "[::]:1", "dns:localhost:1",
        "dns://8.8.8.8/localhost:1", "ipv4:127.0.0.1:1,127.0.0.2:1", "ipv6:[::1]:1", "ipv6:%5B::1%5D:1",
        "unix:/a", "unix:///a", "unix:a", "unix-abstract:a"
      })
  void whatIsOfThisMachine(String target) {
    assertTrue(LocalTarget.isLocal(target));
  }

  @ParameterizedTest
  @ValueSource(
      strings = {
        "icehouse:1", "localhost.example:1", "notlocalhost:1", "127.0.0.1.example:1", "128.0.0.1:1", "[::2]:1", ":1",
        "ipv4:127.0.0.1:1,10.0.0.1:1", "xds:///localhost", "10.0.0.1", "dns:///icehouse:1", "[fe80::1]:1", "[", "%:1",
        "1.2.3.400:1", "dead:beef"
      })
  void whatIsElsewhere(String target) {
    assertFalse(LocalTarget.isLocal(target));
  }
}
