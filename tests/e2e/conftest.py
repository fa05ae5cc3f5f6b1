from testbed.fixtures import api_server as api_server
from testbed.fixtures import helm as helm
from testbed.fixtures import node_cluster as node_cluster
from testbed.fixtures import project_images as project_images
