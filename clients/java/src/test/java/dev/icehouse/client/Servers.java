package dev.icehouse.client;

import com.google.gson.FieldNamingPolicy;
import com.google.gson.GsonBuilder;
import com.google.gson.JsonParser;

/** What tests/system/clients/live_servers.py has started and told in ICEHOUSE_TEST_SERVERS. */
final class Servers {
  static final String VARIABLE = "ICEHOUSE_TEST_SERVERS";

  String model;
  String address;
  int tokensPerMinute;
  String caPath;
  String token;

  static Servers told() {
    return new GsonBuilder()
        .setFieldNamingPolicy(FieldNamingPolicy.LOWER_CASE_WITH_UNDERSCORES)
        .create()
        .fromJson(System.getenv(VARIABLE), Servers.class);
  }

  /** Returns the address that has this key there. */
  static String address(String key) {
    return JsonParser.parseString(System.getenv(VARIABLE)).getAsJsonObject().get(key).getAsString();
  }
}
