package dev.icehouse.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.time.Duration;
import java.util.Map;
import java.util.Optional;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;
import org.junit.jupiter.api.condition.EnabledIfEnvironmentVariable;
import org.junit.jupiter.api.extension.ExtendWith;

/** Each scenario of clients/scenarios.json about waiting for a server; `make test-clients` starts the servers. */
@EnabledIfEnvironmentVariable(named = Servers.VARIABLE, matches = ".+")
@ExtendWith(Scenario.Runner.class)
@Timeout(120)
class ReadyScenariosTest {
  @Test
  void waitReady(Scenario s) {
    assertReady(s, s.client());
  }

  @Test
  void waitReadyComing(Scenario s) {
    var client = s.client();
    var request = s.request().build();
    s.assertRefused(
        assertThrows(IcehouseException.class, () -> client.stream(request).iterator().forEachRemaining(text -> {})));
    assertReady(s, client);
  }

  @Test
  void waitReadyAbsent(Scenario s) {
    assertLate(s);
  }

  @Test
  void waitReadyLoading(Scenario s) {
    assertLate(s);
  }

  private static void assertReady(Scenario s, IcehouseClient client) {
    var server = client.waitReady(timeout(s));
    assertEquals("SERVER_STATE_" + s.expect("state").getAsString(), server.getState().name());
  }

  private static void assertLate(Scenario s) {
    var client = s.client();
    var late = assertThrows(IcehouseException.class, () -> client.waitReady(timeout(s)));
    s.assertRefused(late);
    assertTrue(late.getMessage().contains(s.expect("message_part").getAsString()), late.getMessage());
    assertEquals(Map.of(), late.metadata());
    assertEquals(Optional.empty(), late.field());
    assertEquals(Optional.empty(), late.retryAfter());
  }

  private static Duration timeout(Scenario s) {
    return Duration.ofMillis(s.input("timeout_ms").getAsLong());
  }
}
