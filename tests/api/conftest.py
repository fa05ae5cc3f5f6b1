from testbed.fixtures import api_server as api_server
from testbed.fixtures import helm as helm
from testbed.fixtures import own_api_server as own_api_server
