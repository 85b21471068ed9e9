package dev.icehouse.client;

import com.google.gson.FieldNamingPolicy;
import com.google.gson.GsonBuilder;

/** What tests/system/clients/live_servers.py has started and told in ICEHOUSE_TEST_SERVERS. */
final class Servers {
  static final String VARIABLE = "ICEHOUSE_TEST_SERVERS";

  String model;
  String address;
  String limitedAddress;
  int tokensPerMinute;
  String securedAddress;
  String caPath;
  String token;

  static Servers told() {
    return new GsonBuilder()
        .setFieldNamingPolicy(FieldNamingPolicy.LOWER_CASE_WITH_UNDERSCORES)
        .create()
        .fromJson(System.getenv(VARIABLE), Servers.class);
  }
}
